"""Recurrent layers as a few nodes of the graph, whatever the length of the sequence."""
