"""A run: the request, its problem, measurements, learned figures, and the store on disk that keeps all of it."""
