"""Certificates that hold all over a ball, and decisions that cannot change within one."""
