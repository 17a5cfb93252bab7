"""The parts of launch/bench.py; start reading there."""
