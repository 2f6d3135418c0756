"""What the commands share: errors that become one line, and the options that several of them have."""
