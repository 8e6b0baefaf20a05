"""A run: what was asked, its problem, what was measured and learned, and the store on disk that keeps all of it."""
