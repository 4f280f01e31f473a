"""What ``oases-hf doctor`` finds out of a machine and its ranks, and what is wrong with them.

``facts`` and ``measurements`` say what is known, ``machine``, ``copies`` and ``links`` find it out in processes that
``watching`` ends when they hang, ``diagnosis`` judges it. Only those that find out import torch.
"""
