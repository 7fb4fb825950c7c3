"""A torch of sizes alone: tensors have shapes, strides, types and storages, and no values."""
