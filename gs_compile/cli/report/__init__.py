"""Plans and steps for people: text, tables, pages, figures."""
