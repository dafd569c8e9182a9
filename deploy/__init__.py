"""Where the page runs: containers, and many hosts by Ray Serve."""
