"""Who is served when: a scheduler that decides, a worker that draws, and how long things take."""
