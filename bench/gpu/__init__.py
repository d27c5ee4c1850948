"""What only a GPU can show: one script that trains there, checks what is promised of it, and tells the seconds."""
