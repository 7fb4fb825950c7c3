"""Convolution and recurrent layers, exact on split rows and inside documents. Takes tensors, documents and an axis."""
