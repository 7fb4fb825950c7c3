"""What can be known before a GPU is rented. Arguments in, values or Problems out; torch is never imported here."""
