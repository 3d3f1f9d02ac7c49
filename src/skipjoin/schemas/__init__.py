"""JSON schemas as the compiler of grammars can enforce them. Standard library only."""
