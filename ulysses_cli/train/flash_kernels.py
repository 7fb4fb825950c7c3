"""temporary"""
VERSIONS: dict = {}
