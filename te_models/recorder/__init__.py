"""The flight recorder: statistics of every FP8 tensor, counted where it is cast, and the file that holds them.

Lives here: the counts, the table on the device, and the record's format with its reader.
Not here: the casts (te_models.engine), when a step is recorded, and how a run reacts to a bad one (te_models.training).
"""
