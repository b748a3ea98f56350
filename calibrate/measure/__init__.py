"""Measuring on a GPU. The only part of ``calibrate`` that needs torch, triton and a CUDA device."""
