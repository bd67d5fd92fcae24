"""Speed of the engine: it trains the same federations as an eager loop, both timed side by side in one process."""
