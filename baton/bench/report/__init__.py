"""Reports: renders a result file as one HTML page, or as JSON or CSV for programs.

`measured` checks a result, `page` puts the sections of `plots` and `timeline` together, `chart` is what they draw with.
Take `page.write_report`. `panels` draws values over time for documents.
"""
