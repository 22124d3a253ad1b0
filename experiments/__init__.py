import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before PyTorch is imported: see train.py
