"""One model on several ranks: placement, connections, plan messages, and recovery from the loss of a rank."""
