"""Recipe -> model, loss, optimizer and engine on this rank."""
