"""The driver's calls as tables, and what is generated from them: exports, encoders, decoders, pages. Pure."""
