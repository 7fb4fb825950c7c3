"""What tests share: small models and recipes, rank processes, commands, kill points. Holds no test."""
