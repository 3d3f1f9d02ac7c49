"""One model over several ranks: placement, links, plans as messages, and recovery when a rank is lost."""
