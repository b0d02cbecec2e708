"""Links between processes: control, data, local links, keys, logs. It imports no checkpoints, moves or devices."""
