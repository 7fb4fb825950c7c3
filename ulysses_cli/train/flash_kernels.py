"""temporary"""

VERSIONS: dict = {}
