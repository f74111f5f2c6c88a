"""Scripts to copy and run: python -m examples.demo."""
