"""How fast the engine is: the same federations trained by it and by an eager loop, side by side in one run."""
