"""What if: a server's recorded load in the simulator, under other recipes and limits."""
