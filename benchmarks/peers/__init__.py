"""Scripts that train one federation with another library, each run by a Python that has that library installed."""
