"""What the commands share: errors that become one line, options, progress, tables, files and charts."""
