"""Parts of the demo, launch/demo.py."""
