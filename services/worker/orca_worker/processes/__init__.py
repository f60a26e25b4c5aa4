"""Processes of a pod: forked from one that has imported everything, listened to, ended."""
