"""What runs in a TorchServe worker. It is packed into the archive as `quartet_worker`: imports in here are relative."""
