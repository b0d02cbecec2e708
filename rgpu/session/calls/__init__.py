"""Tables of the driver's calls, and generators for exports, encoders, decoders and documentation pages. Pure."""
