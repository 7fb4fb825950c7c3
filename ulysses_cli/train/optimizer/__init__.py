"""The optimizer's flat weights and moments, wherever they live and however they are encoded."""
