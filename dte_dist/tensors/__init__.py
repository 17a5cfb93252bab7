"""The tensors of one rank at one moment, and many of them as one flat array of elements; no model, no
ranks.
"""
