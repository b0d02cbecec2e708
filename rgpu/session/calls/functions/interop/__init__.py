"""Arrays and textures, graphics APIs, memory of other processes: nearly all are refused, tensor maps are not."""
