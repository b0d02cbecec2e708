"""What connects processes: control, data, local links, keys, logs. It knows no checkpoints, moves or devices."""
