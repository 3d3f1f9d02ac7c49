"""What the figures of papers' evaluations share: runs, reports and pictures."""
