"""Ops as other libraries call them: thin functions for arguments that say nothing to this one.

    from ggrad.mimic.fla import chunk_kda

A module a library.  Nothing here computes.
"""
