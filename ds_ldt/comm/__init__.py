"""What crosses a process boundary, and how: launch, groups, wire schema, transport, agreement of the sites."""
