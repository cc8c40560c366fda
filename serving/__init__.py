"""Serve `.mar` archives: N TorchServe replicas behind one HAProxy endpoint, under supervisord."""
