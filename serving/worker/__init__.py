"""The code that runs inside a TorchServe worker. Packed into the archive as `quartet_worker`, so imports in here are relative."""
