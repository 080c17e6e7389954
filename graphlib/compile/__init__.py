"""From a graph to a plan: where every value lies, and which nodes run together."""
