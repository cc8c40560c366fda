"""What `make compress` tells: a table in the terminal, and a page of its own."""
