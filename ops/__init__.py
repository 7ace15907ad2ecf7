"""Running the system: the command line, the embedded broker, the topics, the demo and the measurements."""
