"""Arrays, textures and tensor maps; graphics APIs and memory of other processes, which are refused."""
