"""Models, recipes and training runs described as plain data, validated on creation.

Not here: anything that imports torch or acts on this data.
"""
