"""How the pages about CUDA came about: `python -m studies.cuda`."""
