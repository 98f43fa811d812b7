from stableair.cli.main import main

main()
