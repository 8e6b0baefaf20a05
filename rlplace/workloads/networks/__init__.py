"""Networks written after their papers, one module each; importing one imports torch."""
