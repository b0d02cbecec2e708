"""What people see of the tool: refusals, tables, lost hosts, questions before harm."""
