"""Engine processes: client, supervision, transport and messages between them and the API process."""
