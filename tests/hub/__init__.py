"""The kernel repositories of `hub/`: their build, their functions, and Transformers' own loader."""
